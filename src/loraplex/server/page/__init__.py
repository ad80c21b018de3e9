"""The operator's page: its files, what happened lately, and one picture a second for all who look."""
