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
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/setting"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

const (
	maxRequestBody = 16 << 10 // bytes
	pollInterval   = 10 * time.Millisecond
)

// Paths of the requests.
const (
	reportURL   = "/v1/report"
	clearURL    = "/v1/clear"
	ignoreURL   = "/v1/ignore"
	simulateURL = "/v1/simulate"
	quiesceURL  = "/v1/quiesce"
	resumeURL   = "/v1/resume"
	rebindURL   = "/v1/rebind"
	reloadURL   = "/v1/reload"
	debugURL    = "/v1/debug"
	explainURL  = "/v1/explain"
	resetURL    = "/v1/reset"

	ownershipURL = "/v1/ownership"
)

var (
	errSimulationOff = errors.New("simulation is off: set simulation = true in the plugin's block, or --simulation=true")
	errBusy          = errors.New("the agent is busy: try again")
)

// handler answers the requests of clients.
type handler struct {
	Agent
	Options
}

func newHandler(a Agent, o Options) http.Handler {
	h := handler{a, o}
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+reportURL, func(w http.ResponseWriter, _ *http.Request) { respond(w, http.StatusOK, h.report()) })
	mux.HandleFunc("GET "+debugURL, func(w http.ResponseWriter, _ *http.Request) { respond(w, http.StatusOK, h.debug()) })
	if o.Ownership != nil {
		mux.HandleFunc("GET "+ownershipURL, func(w http.ResponseWriter, _ *http.Request) { respond(w, http.StatusOK, o.Ownership()) })
	}
	if o.Resets != nil {
		mux.HandleFunc("POST "+resetURL, handle(h, h.reset))
		mux.HandleFunc("GET "+resetURL, h.resetProgress)
	}
	mux.HandleFunc("POST "+explainURL, h.explain)
	mux.HandleFunc("POST "+clearURL, handle(h, h.clear))
	mux.HandleFunc("POST "+ignoreURL, handle(h, h.ignore))
	mux.HandleFunc("POST "+simulateURL, handle(h, h.simulate))
	mux.HandleFunc("POST "+quiesceURL, handle(h, h.quiesce))
	mux.HandleFunc("POST "+resumeURL, handle(h, h.resume))
	mux.HandleFunc("POST "+rebindURL, handle(h, h.rebind))
	mux.HandleFunc("POST "+reloadURL, handle(h, h.reload))
	return mux
}

func (h handler) report() report.Report { return Describe(h.Agent, h.Config, h.Problems) }

// Describe returns the report of a running agent, the same for its socket and its pages. problems may be nil.
func Describe(a Agent, cfg core.Config, problems func() []problem.Problem) report.Report {
	var all []problem.Problem
	if problems != nil {
		all = problems()
	}
	r := report.DescribeAgent(a.State(), cfg, all...).WithUse(a.Use())
	if more, ok := a.(Extender); ok {
		return more.Extend(r)
	}
	return r
}

// handle decodes a command, executes it, and sends and logs its result.
func handle[Args any, Result result](h handler, execute func(context.Context, Args) (Result, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), requestTimeout)
		defer cancel()
		var args Args
		var res Result
		err := decode(w, r, &args)
		if err == nil {
			res, err = execute(ctx, args)
		}
		if errors.Is(err, context.DeadlineExceeded) {
			err = errBusy
		}
		if err != nil {
			h.Log.Warn("command rejected", "command", r.URL.Path, "args", args, "error", err, peer(ctx))
			respond(w, statusCode(err), errorBody{err.Error()})
			return
		}
		respond(w, http.StatusOK, res)
		res.log(h.Log, r.URL.Path, peer(ctx))
	}
}

// decode reads the arguments of a request.
func decode(w http.ResponseWriter, r *http.Request, args any) error {
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxRequestBody)).Decode(args); err != nil {
		return &setting.Error{Key: "request body", Remedy: "want JSON: " + err.Error()}
	}
	return nil
}

// result is that of a command: a response, a driverStatus, a rebindResult, a reloadResult or a resetPlan.
type result interface {
	log(log *slog.Logger, command string, peer slog.Attr)
}

// log writes a line for each condition.
func (r response) log(log *slog.Logger, command string, peer slog.Attr) {
	message := map[string]string{
		clearURL: "condition cleared by operator", ignoreURL: "condition ignored by operator", simulateURL: "fault simulated by operator",
	}[command]
	for _, c := range r.Conditions {
		log.Warn(message, "condition", c.String(), "gpu", c.GPU, "cause", c.Cause, "simulated", c.Simulated, peer)
	}
	r.logReverted(log, command)
}

func (h handler) clear(ctx context.Context, args ClearArgs) (response, error) {
	c, err := argParser{h.State(), time.Now()}.command(args.GPU, args.Cause, args.VerifiedAt)
	if err != nil {
		return response{}, err
	}
	cleared, err := h.Clear(ctx, c)
	if err != nil {
		return response{}, err
	}
	return h.saved(ctx, h.describe(c.GPU, cleared)), nil
}

func (h handler) ignore(ctx context.Context, args IgnoreArgs) (response, error) {
	p := argParser{h.State(), time.Now()}
	c, err := p.command(args.GPU, args.Cause, args.VerifiedAt)
	until, untilErr := p.until("until", args.Until)
	if err := errors.Join(err, untilErr); err != nil {
		return response{}, err
	}
	ignored, err := h.Ignore(ctx, c, until)
	if err != nil {
		return response{}, err
	}
	return h.saved(ctx, h.describe(c.GPU, ignored)), nil
}

// saved waits until the command is on disk, and returns the response with the error if it is not.
func (h handler) saved(ctx context.Context, r response) response {
	r.persistence = newPersistence(saveEnd(ctx, h))
	return r
}

func (h handler) simulate(ctx context.Context, args SimulateArgs) (response, error) {
	if !h.Simulation {
		return response{}, errSimulationOff
	}
	before := h.State()
	o, err := argParser{before, time.Now()}.simulatedFault(args)
	if err != nil {
		return response{}, err
	}
	if !h.Report(o) {
		return response{}, errBusy
	}
	return h.describe(o.At.GPU, h.awaitConditions(ctx, before, o)), nil
}

// awaitConditions waits up to a second for the conditions that a simulated fault causes. There may be none.
func (h handler) awaitConditions(ctx context.Context, before core.State, o health.Observation) []health.Condition {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	old := before.Ledger.Conditions()
	for {
		var caused []health.Condition
		for _, c := range h.State().Ledger.Conditions() {
			unchanged := func(e health.Condition) bool { return same(c, e) && c.Last.Equal(e.Last) && c.Count == e.Count }
			if c.Simulated && c.At.GPU == o.At.GPU && c.Code == o.Code && !slices.ContainsFunc(old, unchanged) {
				caused = append(caused, c)
			}
		}
		if len(caused) > 0 || !watch.Sleep(ctx, pollInterval) {
			return caused
		}
	}
}

// describe describes the changed conditions, in their present form if they still exist, and the other conditions of the
// GPU that have an effect.
func (h handler) describe(id gpu.DeviceID, changed []health.Condition) response {
	s := h.State()
	changed = slices.Clone(changed)
	var others []health.Condition
	for _, c := range s.Ledger.Conditions() {
		if i := slices.IndexFunc(changed, func(o health.Condition) bool { return same(c, o) }); i >= 0 {
			changed[i] = c
		} else if c.At.GPU == id && c.State > health.Healthy && c.IgnoredUntil.IsZero() {
			others = append(others, c)
		}
	}
	return response{
		Conditions:      report.DescribeConditions(s, h.Config, changed),
		OtherConditions: report.DescribeConditions(s, h.Config, others),
	}
}

func same(a, b health.Condition) bool {
	return a.At == b.At && a.Reason == b.Reason && a.Code == b.Code && a.Simulated == b.Simulated
}

type errorBody struct {
	Error string `json:"error"`
}

func statusCode(err error) int {
	is := func(target any) bool { return errors.As(err, target) }
	switch {
	case is(new(*health.NewerFaultError)), is(new(*health.UnresponsiveError)), is(new(*monitor.HeldError)), errors.Is(err, monitor.ErrNotQuiesced),
		errors.Is(err, gpu.ErrNoDriver):
		return http.StatusConflict
	case is(new(*health.NoConditionError)):
		return http.StatusNotFound
	case is(new(*setting.Error)):
		return http.StatusBadRequest
	case errors.Is(err, errSimulationOff):
		return http.StatusForbidden
	}
	return http.StatusServiceUnavailable
}

func respond(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body) // fails only if the client has closed the connection
}
