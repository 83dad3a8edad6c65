"""What every family of diffusers pipelines shares (extra `diffusers`): loading, export, cached text conditioning."""
