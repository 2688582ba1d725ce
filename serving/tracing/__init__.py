"""What a request did where and when, as OpenTelemetry spans; nothing at all when it is off."""
