// Package pictures tests what operators look at: the status page in headless Chromium, the Grafana dashboard, and the Prometheus
// rules. "make pictures" installs what it needs and runs it; with -update the screenshots of docs/images are taken again, and the
// list of alerts in docs/monitoring.md is written.
package pictures
