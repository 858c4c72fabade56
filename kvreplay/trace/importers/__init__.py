"""Other tools' files, as workloads."""
