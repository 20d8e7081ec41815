"""What an optimizer says about itself: summary, diagnostics, findings."""
