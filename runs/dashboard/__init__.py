"""The "CF Timeline" page of TensorBoard.

It lives here and not in `adaptive`, whose import brings torch along: TensorBoard loads its plugins
whenever it starts, and would take 1.5 seconds and 200 MB more. Nothing here imports torch.
"""
