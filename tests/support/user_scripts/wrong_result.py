"""Attributes that results do not have."""

import jaxgrpo as jg

run = jg.train("quickstart")
print(run.metrics[-1], run.summary["parameter_hash"])
print(run.accuracy)  # error: reportAttributeAccessIssue
model, params = jg.load_model(run.path / "model")
print(model.config.num_layer)  # error: reportAttributeAccessIssue
numbers = jg.evaluate(run.path)
print(numbers.accuracy)  # error: reportAttributeAccessIssue
