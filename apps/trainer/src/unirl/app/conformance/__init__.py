"""What every engine does with every model and algorithm, measured on the small models that come with the trainer.

small_models  a checkpoint of a family of which none comes with the trainer
cases       the models, engines and algorithms, as recipes
checks      what is measured of an engine that runs
matrix      the whole table, and what of it is worse than before
page        the table as Markdown
command     the verb of `trainer`
"""
