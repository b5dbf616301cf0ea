"""What every program has: options and their errors, its start and readiness, logs, exported figures, its
end."""
