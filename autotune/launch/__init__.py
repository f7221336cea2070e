"""Starts ranks in processes of their own, holds deadlines and limits, leaves nothing behind: config -> TrialResult."""
