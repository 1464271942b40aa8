"""Adapters for training frameworks: a file each, imported only by whoever uses that framework.

    from adaptive.integrations.lightning import AdaptiveCompressionCallback  # Lightning's Trainer
    from adaptive.integrations.hf import AdaptiveCompressionCallback  # Hugging Face's Trainer

With Accelerate and Fabric, `AdaptiveCompressor.attach` takes what they have wrapped.
docs/frameworks.md says what is saved where.
"""
