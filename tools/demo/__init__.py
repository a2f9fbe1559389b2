"""The model, the prompts and the script of `nox -s demo`; run with tools/ on the path."""
