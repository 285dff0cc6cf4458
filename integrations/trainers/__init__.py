"""halfstep inside the trainers of other libraries: a module per library, and a class per class that it replaces.

``halfstep.integrations.trainers.<library>.<Name>`` takes the place of ``<library>.<Name>`` and has its arguments, so
that the one line to change is the import. Each module imports its own library and no other; the extra ``trainers``
installs those that are tested. docs/trainers.md says what works in each, and names the test of each statement.
"""
