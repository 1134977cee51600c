"""Says what things are: models, jobs, plans, schedules, precisions, clusters. No torch; nothing of this package but
`errors`."""
