"""The fleet as a gateway reports it: as JSON, as samples for the dashboard, as its pages."""
