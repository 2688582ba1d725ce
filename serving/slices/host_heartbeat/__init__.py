"""The stream from a host of a slice to the slice's replica: its heartbeat and its notices.

The host's agent serves it (`server`), and the replica connects (`watcher`). Beyond loopback both
ends prove the cluster secret first, in TLS: a stranger hears nothing and is not believed. The end
of the stream is the fastest sign of a lost host: Ray takes 12 to 15 s.
"""
