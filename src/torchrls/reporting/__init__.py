"""Reports about an optimizer: summary, diagnostics, findings."""
