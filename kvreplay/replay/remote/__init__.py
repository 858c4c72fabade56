"""Instances in processes of their own, which talk over real sockets in paced real time."""
