"""Fixtures: a tiny SD3 saved as a real folder and loaded through the real code."""

import os

import torch

os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)
