"""The slice provisioner: it adds the slices that replicas wait for, and drops idle ones.

`demand` and `plan` decide, `reconcile` repeats, a `Provisioner` (`protocol`) carries out. Which
slices there are is decided here and nowhere else; Ray's autoscaler leaves TPU worker groups alone.
"""
