"""What distillation needs of its teacher and of the trajectory. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.types.recipe import Messages, Part, Run


def teacher_is_there(own: Part, run: Run) -> Messages:
    """The teacher is a policy of the recipe that neither trains nor samples."""
    option = own.ability("teacher_option")
    name = own.get(option)
    if name in run.teachers:
        return
    what = "trains or samples itself" if name in run.all_policies else "is no policy of this recipe"
    yield (
        f"{own.at}.{option} = {name} {what}. Add policies.{name} with trains: false, a bundle and a pipeline, and no "
        "engine."
    )


def teacher_reads_the_conditions(own: Part, run: Run) -> Messages:
    """A teacher of images is of the student's class, whose conditions it is given."""
    teacher = run.teachers.get(own.get(own.ability("teacher_option")))
    student = run.policy_of(own)
    if teacher is None or own.ability("trains_tokens") or teacher.bundle.path == student.bundle.path:
        return
    yield (
        f"{teacher.bundle.at}._target_ = {teacher.bundle.path} reads other conditions than the student's "
        f"{student.bundle.path}. Take a teacher of the student's class."
    )


def latents_are_kept(own: Part, run: Run) -> Messages:
    """The latents at which velocities are matched are kept, and there are enough of them."""
    if own.ability("trains_tokens"):
        return
    kept, steps = run.sampling.get("keep_latents", "transitions"), run.sampling.get("num_inference_steps", 1)
    if kept != "all":
        yield (
            f"{own.name} needs every latent of the trajectory, but sampling.keep_latents = {kept!r}. Set "
            "sampling.keep_latents: all."
        )
    wanted = own.number("num_timesteps")
    if wanted is not None and wanted > steps:
        yield (
            f"{own.at}.num_timesteps = {wanted} exceeds sampling.num_inference_steps = {steps}. Lower the first or "
            "raise the second."
        )


RULES = (teacher_is_there, teacher_reads_the_conditions, latents_are_kept)
