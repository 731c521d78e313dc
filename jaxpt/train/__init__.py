"""Programs: a run is the scan of a pure step."""
