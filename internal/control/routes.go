package control

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/report"
)

// maxBody bounds an order, in bytes.
const maxBody = 16 << 10

// Where the client finds what.
const (
	reportURL   = "/v1/report"
	clearURL    = "/v1/clear"
	ignoreURL   = "/v1/ignore"
	simulateURL = "/v1/simulate"
	quiesceURL  = "/v1/quiesce"
	resumeURL   = "/v1/resume"
	rebindURL   = "/v1/rebind"
	debugURL    = "/v1/debug"
)

var (
	errSimulationOff = errors.New("simulation is off: set simulation = true in the plugin's block, or --simulation=true")
	errBusy          = errors.New("the agent has no time for it now; try again")
)

// desk is where requests are taken.
type desk struct {
	Agent
	Options
}

func routes(a Agent, o Options) http.Handler {
	d := desk{a, o}
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+reportURL, func(w http.ResponseWriter, _ *http.Request) { reply(w, http.StatusOK, d.report()) })
	mux.HandleFunc("POST "+clearURL, obey(d, d.clear))
	mux.HandleFunc("POST "+ignoreURL, obey(d, d.ignore))
	mux.HandleFunc("POST "+simulateURL, obey(d, d.simulate))
	mux.HandleFunc("POST "+quiesceURL, obey(d, d.quiesce))
	mux.HandleFunc("POST "+resumeURL, obey(d, d.resume))
	mux.HandleFunc("POST "+rebindURL, obey(d, d.rebind))
	mux.HandleFunc("GET "+debugURL, func(w http.ResponseWriter, _ *http.Request) { reply(w, http.StatusOK, d.debug()) })
	return mux
}

func (d desk) report() report.Report {
	var notes []string
	if d.Warnings != nil {
		notes = d.Warnings()
	}
	r := report.DescribeState(d.State(), d.Config, notes...)
	r.Source = report.FromAgent
	return r
}

// obey reads an order in words, has it carried out and says what became of it, to the client and in the log.
func obey[Args any, Outcome outcome](d desk, do func(context.Context, Args) (Outcome, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), requestAtMost)
		defer cancel()
		var args Args
		var answer Outcome
		err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody)).Decode(&args)
		if err != nil {
			err = &core.ConfigError{Key: "order", Remedy: "want JSON: " + err.Error()}
		} else {
			answer, err = do(ctx, args)
		}
		if errors.Is(err, context.DeadlineExceeded) {
			err = errBusy
		}
		if err != nil {
			d.Log.Warn("operator's order refused", "order", r.URL.Path, "args", args, "error", err, peer(ctx))
			reply(w, status(err), refusal{err.Error()})
			return
		}
		reply(w, http.StatusOK, answer)
		answer.log(d.Log, r.URL.Path, peer(ctx))
	}
}

// outcome is what becomes of an order: an Answer, a Standing or a Rebound.
type outcome interface {
	log(log *slog.Logger, order string, by slog.Attr)
}

// log writes a line per condition.
func (a Response) log(log *slog.Logger, order string, by slog.Attr) {
	said := map[string]string{
		clearURL: "operator cleared", ignoreURL: "operator ignores", simulateURL: "operator simulates",
	}[order]
	for _, c := range a.Conditions {
		log.Warn(said, "condition", c.String(), "gpu", c.GPU, "cause", c.Cause, "simulated", c.Simulated, by)
	}
	if a.NotKept != "" {
		log.Warn("a restart of the agent undoes the operator's order", "order", order, "reason", a.NotKept)
	}
}

func (d desk) clear(ctx context.Context, args ClearArgs) (Response, error) {
	o, err := words{d.State(), time.Now()}.order(args.GPU, args.Cause, args.VerifiedAt)
	if err != nil {
		return Response{}, err
	}
	cleared, err := d.Clear(ctx, o)
	if err != nil {
		return Response{}, err
	}
	return d.kept(ctx, d.answer(o.GPU, cleared)), nil
}

func (d desk) ignore(ctx context.Context, args IgnoreArgs) (Response, error) {
	said := words{d.State(), time.Now()}
	o, err := said.order(args.GPU, args.Cause, args.VerifiedAt)
	until, untilErr := said.until(args.Until)
	if err := errors.Join(err, untilErr); err != nil {
		return Response{}, err
	}
	ignored, err := d.Ignore(ctx, o, until)
	if err != nil {
		return Response{}, err
	}
	return d.kept(ctx, d.answer(o.GPU, ignored)), nil
}

// kept is an answer once what was ordered is on disk, or with the reason why it is not.
func (d desk) kept(ctx context.Context, a Response) Response {
	if err := keepEnd(ctx, d); err != nil {
		a.NotKept = err.Error()
	}
	return a
}

func (d desk) simulate(ctx context.Context, args SimulateArgs) (Response, error) {
	if !d.Simulation {
		return Response{}, errSimulationOff
	}
	before := d.State()
	o, err := words{before, time.Now()}.rehearsal(args)
	if err != nil {
		return Response{}, err
	}
	if !d.Report(o) {
		return Response{}, errBusy
	}
	return d.answer(o.At.GPU, d.came(ctx, before, o)), nil
}

// came waits a moment for the conditions that follow from a rehearsed fault. There may be none.
func (d desk) came(ctx context.Context, before core.State, o core.Observation) []core.Condition {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	look := time.NewTicker(10 * time.Millisecond)
	defer look.Stop()
	old := before.Ledger.Conditions()
	for {
		var came []core.Condition
		for _, c := range d.State().Ledger.Conditions() {
			happened := func(e core.Condition) bool { return same(c, e) && c.Last.Equal(e.Last) && c.Count == e.Count }
			if c.Simulated && c.At.GPU == o.At.GPU && c.Code == o.Code && !slices.ContainsFunc(old, happened) {
				came = append(came, c)
			}
		}
		if len(came) > 0 {
			return came
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// answer says what became of conditions, as they stand now where they still do, and what else stands.
func (d desk) answer(gpu core.DeviceID, ordered []core.Condition) Response {
	s := d.State()
	ordered = slices.Clone(ordered)
	var others []core.Condition
	for _, c := range s.Ledger.Conditions() {
		if i := slices.IndexFunc(ordered, func(o core.Condition) bool { return same(c, o) }); i >= 0 {
			ordered[i] = c
		} else if c.At.GPU == gpu && c.State > core.Healthy && c.IgnoredUntil.IsZero() {
			others = append(others, c)
		}
	}
	return Response{
		Conditions: report.DescribeConditions(s, d.Config, ordered),
		Driver:     report.DescribeConditions(s, d.Config, others),
	}
}

func same(a, b core.Condition) bool {
	return a.At == b.At && a.Reason == b.Reason && a.Code == b.Code && a.Simulated == b.Simulated
}

// refusal is the body of an error.
type refusal struct {
	Error string `json:"error"`
}

func status(err error) int {
	is := func(target any) bool { return errors.As(err, target) }
	switch {
	case is(new(*core.NewerFaultError)), is(new(*core.UnresponsiveError)), is(new(*monitor.HeldError)), errors.Is(err, monitor.ErrNotQuiesced),
		errors.Is(err, core.ErrNoDriver):
		return http.StatusConflict
	case is(new(*core.NoConditionError)):
		return http.StatusNotFound
	case is(new(*core.ConfigError)):
		return http.StatusBadRequest
	case errors.Is(err, errSimulationOff):
		return http.StatusForbidden
	}
	return http.StatusServiceUnavailable
}

func reply(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body) // who went away does not want it
}
