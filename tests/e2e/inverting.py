"""An engine that decodes otherwise than the trainer, for tests of the comparison of both."""

from unirl.rollout.engine.replica.engine import ReplicaRolloutEngine


class InvertingEngine(ReplicaRolloutEngine):
    """Gives the negative of every image. Its latents and log-probs are right, so that no canary finds it."""

    def _kept(self, media):
        return super()._kept(media.replace(pixels=1 - media.pixels))
