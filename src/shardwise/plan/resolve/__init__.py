"""Every `auto` of a config becomes a value, or the job is refused with a reason."""
