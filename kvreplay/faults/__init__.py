"""Faults: the verbs, the plan, the injector, and the catalogue read from the connectors."""
