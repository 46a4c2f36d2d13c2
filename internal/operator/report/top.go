package report

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/holders"
)

// Screen is what a table of WriteTop has to fit.
type Screen struct {
	Columns, Rows int // 0 = no limit
}

// WriteTop writes what the devices do and which work has them, in a table that fits a screen, without a line feed after the last line.
// Columns that do not fit are cut or left out; rows that do not fit are counted. In these cases unhealthy devices come first.
func (r Report) WriteTop(w io.Writer, agent string, now time.Time, s Screen) error {
	lines := []string{r.topNode(agent, now)}
	if u := r.OwnersUnknown; u != nil && u.Remedy != "" {
		lines = append(lines, u.String())
	}
	devices := slices.Clone(r.Devices)
	room := s.Rows - len(lines) - 1 // the names of columns
	hidden := 0
	if s.Rows > 0 && len(devices) > room {
		slices.SortStableFunc(devices, func(a, b Device) int { return cmp.Compare(b.State, a.State) })
		hidden = len(devices) - max(room-1, 0)
	}
	if shown := devices[:len(devices)-hidden]; len(shown) > 0 {
		lines = append(lines, r.topTable(shown, now, s.Columns)...)
	}
	if hidden > 0 {
		lines = append(lines, fmt.Sprintf("%d more: %s", hidden, stateCounts(devices[len(devices)-hidden:])))
	}
	lines = append(lines, r.topLimits(cmp.Or(s.Rows, math.MaxInt)-len(lines))...)
	if s.Rows > 0 {
		lines = lines[:min(len(lines), s.Rows)]
	}
	for i := range lines {
		lines[i] = cut(lines[i], s.Columns)
	}
	_, err := io.WriteString(w, strings.Join(lines, "\n"))
	return err
}

// topNode is the line about the node: "k8s-gpu  10:31:05  8 devices: 7 healthy, 1 lost  2 warnings  driver ready 570.124.06, CUDA 12.8".
func (r Report) topNode(agent string, now time.Time) string {
	driver := "driver " + r.Driver.State
	switch {
	case r.Driver.Reason != "":
		driver += ": " + r.Driver.Reason
	case r.Driver.Version != "":
		driver += " " + r.Driver.Version + ", CUDA " + r.Driver.CUDA + r.Driver.reset()
	}
	if r.Source == FromDriver {
		agent += " (not running)"
	}
	parts := []string{agent, now.Format(time.TimeOnly), Noun(len(r.Devices), "device")}
	if states := stateCounts(r.Devices); states != "" {
		parts[2] += ": " + states
	}
	if n := len(r.Excluded); n > 0 {
		parts = append(parts, fmt.Sprintf("%d excluded", n))
	}
	if n := len(r.Warnings) + len(r.PolicyWarnings) + len(r.Overlaps); n > 0 {
		parts = append(parts, Noun(n, "warning"))
	}
	return strings.Join(append(parts, driver), "  ")
}

// Noun is a count with its noun: "1 GPU", "2 GPUs".
func Noun(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

func stateCounts(devices []Device) string {
	count := map[health.State]int{}
	for _, d := range devices {
		count[d.State]++
	}
	return StateCounts(count)
}

// StateCounts are numbers of devices by state, the healthy ones first: "7 healthy, 1 lost".
func StateCounts(count map[health.State]int) string {
	var texts []string
	for state := health.Healthy; state <= health.GPULost; state++ {
		if n := count[state]; n > 0 {
			texts = append(texts, fmt.Sprintf("%d %s", n, state))
		}
	}
	return strings.Join(texts, ", ")
}

// column is a column of the table.
type column struct {
	name  string
	least int // width to which it is cut before another one is left out; 0 = it is not cut
	drop  int // columns with a lower number are left out first; 0 = it is never left out
	right bool
	text  func(d Device, now time.Time) string
}

const ownerColumn = "OWNER"

var topColumns = []column{
	{name: "GPU", text: func(d Device, _ time.Time) string { return d.CurrentIndex() }},
	{name: "MODEL", least: 10, drop: 1, text: func(d Device, _ time.Time) string { return strings.TrimPrefix(d.Model, "NVIDIA ") }},
	{name: "HEALTH", least: 16, text: topHealth},
	{name: "GPU%", right: true, text: func(d Device, _ time.Time) string {
		return d.Usage.value(func(u Usage) *uint64 { return u.GPUPercent }, 1)
	}},
	{name: "MEMORY GiB", right: true, drop: 6, text: func(d Device, _ time.Time) string {
		return ratio(d.Usage.memory(func(u Usage) *uint64 { return u.MemoryUsedBytes }), d.Usage.memory(func(u Usage) *uint64 { return u.MemoryTotalBytes }))
	}},
	{name: "POWER W", right: true, drop: 3, text: func(d Device, _ time.Time) string {
		return ratio(d.Usage.value(func(u Usage) *uint64 { return u.PowerMilliwatts }, 1000), d.Usage.value(func(u Usage) *uint64 { return u.PowerLimitMilliwatts }, 1000))
	}},
	{name: "TEMP C", right: true, drop: 2, text: func(d Device, _ time.Time) string {
		return d.Usage.value(func(u Usage) *uint64 { return u.TemperatureCelsius }, 1)
	}},
	{name: ownerColumn, least: 16, drop: 7, text: func(d Device, _ time.Time) string { return topOwner(d) }},
	{name: "HELD", right: true, drop: 4, text: func(d Device, now time.Time) string { return age(d.HeldSince, now) }},
	{name: "IDLE", right: true, drop: 5, text: func(d Device, now time.Time) string { return age(d.IdleSince, now) }},
}

const columnGap = 2

// topTable returns the lines of the table, with the names of the columns. width 0 is no limit.
func (r Report) topTable(devices []Device, now time.Time, width int) []string {
	columns, cells, widths := slices.Clone(topColumns), make([][]string, len(topColumns)), make([]int, len(topColumns))
	for i, c := range columns {
		cells[i] = []string{c.name}
		for _, d := range devices {
			text := c.text(d, now)
			if c.name == ownerColumn {
				text = r.ownerCell(d, text)
			}
			cells[i] = append(cells[i], cmp.Or(text, "-"))
		}
		for _, text := range cells[i] {
			widths[i] = max(widths[i], len([]rune(text)))
		}
	}
	fit(columns, widths, width)
	lines := make([]string, len(devices)+1)
	for row := range lines {
		var b strings.Builder
		for i := range columns {
			if widths[i] == 0 {
				continue
			}
			text := cut(cells[i][row], widths[i])
			pad := strings.Repeat(" ", widths[i]-len([]rune(text)))
			if columns[i].right {
				text, pad = pad+text, ""
			}
			b.WriteString(text + pad + strings.Repeat(" ", columnGap))
		}
		lines[row] = strings.TrimRight(b.String(), " ")
	}
	return lines
}

// ownerCell is the owner of a device by its text. The processes on a GPU that is taken are those of its proof or reset.
func (r Report) ownerCell(d Device, text string) string {
	if len(d.Owners) == 0 {
		text = cmp.Or(r.takenBy(d.GPU), text)
	}
	if r.OwnersUnknown != nil {
		text = cmp.Or(text, "unknown")
	}
	return text
}

// excess is by how much columns are wider than a screen.
func excess(widths []int, width int) int {
	if width == 0 {
		return 0
	}
	sum := -columnGap
	for _, w := range widths {
		if w > 0 {
			sum += w + columnGap
		}
	}
	return sum - width
}

// fit leaves out columns until the others fit if they are cut as far as they can be, and then cuts them no more than needed.
func fit(columns []column, widths []int, width int) {
	least := make([]int, len(widths))
	for i, c := range columns {
		if least[i] = widths[i]; c.least > 0 {
			least[i] = min(widths[i], c.least)
		}
	}
	for excess(least, width) > 0 {
		next := -1
		for i, c := range columns {
			if c.drop > 0 && widths[i] > 0 && (next < 0 || c.drop < columns[next].drop) {
				next = i
			}
		}
		if next < 0 { // the lines are cut
			break
		}
		widths[next], least[next] = 0, 0
	}
	for excess(widths, width) > 0 {
		widest := 0
		for i := range widths {
			if widths[i]-least[i] > widths[widest]-least[widest] {
				widest = i
			}
		}
		if widths[widest] == least[widest] {
			break
		}
		widths[widest]--
	}
}

// cut returns the beginning of a text that fits a width; 0 = no limit.
func cut(text string, width int) string {
	runes := []rune(text)
	if width == 0 || len(runes) <= width {
		return text
	}
	if width == 1 {
		return "…"
	}
	return string(runes[:width-1]) + "…"
}

// topHealth is the health with its cause and for how long: "unhealthy XID_95 12m".
func topHealth(d Device, now time.Time) string {
	text := d.State.String()
	if d.Cause != "" && !strings.EqualFold(d.Cause, text) {
		text += " " + d.Cause
	}
	if !d.Since.IsZero() && d.State != health.Healthy {
		text += " " + age(d.Since, now)
	}
	switch {
	case d.Simulated:
		return "simulated: " + text
	case d.Advisory:
		return "observed: " + text
	}
	return text
}

// topOwner is the first owner and the number of the others; without an owner, the processes.
func topOwner(d Device) string {
	switch n := len(d.Owners); {
	case n == 1:
		return ownerText(d.Owners[0])
	case n > 1:
		return fmt.Sprintf("%s +%d", ownerText(d.Owners[0]), n-1)
	case len(d.Processes) == 1:
		return fmt.Sprintf("pid %d", d.Processes[0].PID)
	case len(d.Processes) > 1:
		return fmt.Sprintf("pid %d +%d", d.Processes[0].PID, len(d.Processes)-1)
	}
	return ""
}

// ownerText names an owner in one line. A row has the ID in place of a name that is not known: an owner without one would look like none.
func ownerText(o Owner) string {
	o.Name = cmp.Or(o.Name, o.ID, "unknown")
	return holders.Work(o).Short()
}

// value is a value of a usage as a decimal number; "" if it is not known.
func (u *Usage) value(of func(Usage) *uint64, unit uint64) string {
	if u == nil || of(*u) == nil {
		return ""
	}
	return strconv.FormatUint((*of(*u)+unit/2)/unit, 10)
}

// memory is a number of bytes in GiB; "" if it is not known.
func (u *Usage) memory(of func(Usage) *uint64) string {
	if u == nil || of(*u) == nil {
		return ""
	}
	return strconv.FormatFloat(float64(*of(*u))/(1<<30), 'f', 1, 64)
}

func ratio(used, limit string) string {
	if used == "" && limit == "" {
		return ""
	}
	return cmp.Or(used, "-") + "/" + cmp.Or(limit, "-")
}

// age is the time since t in its two largest units: "12m", "2h13m", "3d4h"; "" if t is zero.
func age(t, now time.Time) string {
	if t.IsZero() {
		return ""
	}
	d := max(now.Sub(t), 0)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 24*time.Hour:
		return fmt.Sprintf("%dh%dm", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%dd%dh", int(d.Hours())/24, int(d.Hours())%24)
}
