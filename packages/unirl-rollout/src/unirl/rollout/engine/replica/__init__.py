"""Engines that sample with a copy of the model, which receives pushes of the policy. No other packages are needed."""
