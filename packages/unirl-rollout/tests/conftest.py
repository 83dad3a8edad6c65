"""One thread: the tests compare bits."""

import torch

torch.set_num_threads(1)
