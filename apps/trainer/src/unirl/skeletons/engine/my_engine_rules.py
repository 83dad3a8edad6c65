from unirl.rollout.engine.served_latents.rules import kernel_is_served, sampling_is_served

RULES = (kernel_is_served(("FlowSDEStrategy",)), sampling_is_served)
