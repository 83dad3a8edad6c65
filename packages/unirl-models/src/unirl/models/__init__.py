"""Model adapters: what a diffusion model must answer to be sampled, replayed and trained.

`adapter` is the contract, `diffusion` the stage that samples and replays any adapter, `pipeline` the object that an
engine and a trainer hold, `guidance` classifier-free guidance over rows, `embedding_cache` encoded prompts, `loading`
pipeline folders. One folder per model family holds its bundle and adapter; a family imports its own framework.
`diffusers_pipeline` and `causal_lm` hold the base classes of families on diffusers and of language models.
Shape letters, used as suffixes in every module:

    B  samples
    R  rows of one forward, each with its own sigma and step (R = B while sampling, R = B S in a replay)
    S  stochastic steps of a trajectory
    T  steps of a schedule, which has T + 1 sigmas
    L  tokens        D  width of a token        P  width of a pooled embedding
    C H W  latent channels, height, width       F  latent frames
    ...    the latent shape, for example C H W, C F H W or L D
"""
