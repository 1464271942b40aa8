"""One step: a gradient's way to the ranks' mean (reducer), and the policy's plan (controller)."""
