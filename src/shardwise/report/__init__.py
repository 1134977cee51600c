"""Everything a run prints."""
