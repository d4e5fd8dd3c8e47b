"""Trainings that are sick, each with a healthy twin of the same model: what `replay check` should find, and should not.

python -m examples.sick runs/sick            # all of them
python -m examples.sick runs/sick lr_spike   # some
"""

from examples.sick.ailments import AILMENTS as AILMENTS
