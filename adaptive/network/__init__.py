"""The network between the ranks: collectives and their order, the link, the times of a step."""
