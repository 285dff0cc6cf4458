"""halfstep in the trainers of other libraries: one module per library, with drop-in classes.

``halfstep.integrations.trainers.<library>.<Name>`` replaces ``<library>.<Name>`` and takes the same arguments, so only
the import changes. Each module imports its own library and no other; the extra ``trainers`` installs the versions that
are tested. docs/trainers.md says what works in each, and names the test of each statement.
"""
