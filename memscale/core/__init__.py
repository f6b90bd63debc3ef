"""What every floor stands on: errors, units, pytrees, values as data, patterns over paths, host memory."""
