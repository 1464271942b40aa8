"""The experiments behind the notes in docs/, run from the repository's root: `python -m
docs.studies.peers`, `python -m docs.studies.moves`, `python -m docs.studies.gossip`."""
