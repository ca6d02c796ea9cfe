"""The commands that look ahead: forecast, advise and propose."""
