"""One thread, so that test runs side by side do not slow each other down."""

import torch

torch.set_num_threads(1)
