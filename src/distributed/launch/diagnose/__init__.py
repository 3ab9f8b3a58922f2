"""Why a run failed, from what it left behind: logs of all ranks, failure records, events, flight recorders."""
