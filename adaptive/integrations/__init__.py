"""Adapters for training frameworks. Users of a framework import its file; nothing else does.

    from adaptive.integrations.lightning import AdaptiveCompressionCallback  # Lightning's Trainer
    from adaptive.integrations.hf import AdaptiveCompressionCallback  # Hugging Face's Trainer

`AdaptiveCompressor.attach` takes models and optimizers that Accelerate or Fabric have wrapped.
docs/frameworks.md says what is saved where.
"""
