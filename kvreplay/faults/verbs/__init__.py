"""One verb a file. A module here exports `VERB`; the registry finds it by being here."""
