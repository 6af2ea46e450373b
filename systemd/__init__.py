"""What a service manager needs: units, users, folders, the reference configuration, dashboards. Files, no code."""
