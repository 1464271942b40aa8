"""The process group and its time: collectives, their order, the link, where a step's seconds go."""
