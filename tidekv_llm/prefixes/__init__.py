"""Where a document's keys and values wait for the next question: host memory or disk, never the device."""
