"""One bucket in one step: what of it is compressed, remembered and measured."""
