"""Large bodies of requests: read, judged and rendered in forks, and never by the gateway's loop."""
