"""One step: a script's settings, a gradient's way to the ranks' mean, and the policy's plan."""
