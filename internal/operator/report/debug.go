package report

import (
	"fmt"
	"io"
	"strings"
	"time"
)

// Debug is the internal state of a running agent. Unlike Report its JSON is not an interface: keys may change.
type Debug struct {
	PID             int      `json:"pid"`
	Goroutines      int      `json:"goroutines"`
	Threads         int      `json:"threads"` // a driver call that hangs occupies one
	FileDescriptors int      `json:"fileDescriptors"`
	OpenDeviceNodes []string `json:"openDeviceNodes"` // NVIDIA's, that the process has open
	HeapBytes       uint64   `json:"heapBytes"`

	Tasks           []Task     `json:"tasks"`        // registered with the watchdog
	Calls           []Call     `json:"driverCalls"`  // in progress, except the event wait
	Endpoints       []Endpoint `json:"endpoints"`    // sockets for the kubelet; none under Nomad
	HealthChecks    uint64     `json:"healthChecks"` // rounds since the start
	LastHealthCheck time.Time  `json:"lastHealthCheck,omitzero"`
	Stacks          string     `json:"stacks"` // of all goroutines
}

// Task is one loop of the agent.
type Task struct {
	Name          string    `json:"name"`
	LastHeartbeat time.Time `json:"lastHeartbeat"`
	Heartbeats    uint64    `json:"heartbeats"`
	Overdue       bool      `json:"overdue"` // the next heartbeat is late
}

// Call is a driver call in progress.
type Call struct {
	Name  string    `json:"name"`
	Index int       `json:"index"` // NVML index of the GPU; -1 = none
	Since time.Time `json:"since"`
}

// Endpoint is the socket of one resource for the kubelet.
type Endpoint struct {
	Resource      string    `json:"resource"`
	Status        string    `json:"status"`
	Since         time.Time `json:"since"` // of the status
	Socket        string    `json:"socket,omitempty"`
	Registrations uint64    `json:"registrations"`
	Responses     uint64    `json:"responses"` // of ListAndWatch
	LastError     string    `json:"lastError,omitempty"`
	LastErrorAt   time.Time `json:"lastErrorAt,omitzero"`
}

// Write writes it as text for operators, the stacks last.
func (d Debug) Write(w io.Writer) error {
	fmt.Fprintf(w, "pid %d, %d goroutines, %d threads, %d file descriptors, heap %d KiB\n",
		d.PID, d.Goroutines, d.Threads, d.FileDescriptors, d.HeapBytes>>10)
	nodes := "none"
	if len(d.OpenDeviceNodes) > 0 {
		nodes = strings.Join(d.OpenDeviceNodes, " ")
	}
	fmt.Fprintf(w, "open device nodes: %s\n", nodes)
	fmt.Fprintf(w, "health checks: %d, last %s\n", d.HealthChecks, moment(d.LastHealthCheck))
	t := NewTable(w)
	fmt.Fprintln(t, "\nTASK\tLAST HEARTBEAT\tHEARTBEATS\tSTATE")
	for _, p := range d.Tasks {
		state := "ok"
		if p.Overdue {
			state = "OVERDUE"
		}
		fmt.Fprintf(t, "%s\t%s\t%d\t%s\n", p.Name, moment(p.LastHeartbeat), p.Heartbeats, state)
	}
	if len(d.Endpoints) > 0 {
		fmt.Fprintln(t, "\nRESOURCE\tSTATUS\tSINCE\tREGISTRATIONS\tRESPONSES\tLAST ERROR")
	}
	for _, e := range d.Endpoints {
		lastError := "none"
		if e.LastError != "" {
			lastError = moment(e.LastErrorAt) + " " + e.LastError
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%d\t%s\n", e.Resource, e.Status, moment(e.Since), e.Registrations, e.Responses, lastError)
	}
	if len(d.Calls) > 0 {
		fmt.Fprintln(t, "\nDRIVER CALL\tGPU\tSINCE")
	}
	for _, c := range d.Calls {
		fmt.Fprintf(t, "%s\t%d\t%s\n", c.Name, c.Index, moment(c.Since))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "\n%s", d.Stacks)
	return err
}

func moment(t time.Time) string {
	if t.IsZero() {
		return "never"
	}
	return t.UTC().Format("2006-01-02T15:04:05.000Z")
}
