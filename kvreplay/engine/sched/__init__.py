"""The scheduler in layers, each a class that uses only those below it: state, lockstep, hybrid_growth, ends, running,
admission."""
