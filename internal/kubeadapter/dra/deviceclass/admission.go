package deviceclass

import (
	_ "embed"
	"regexp"
	"strings"

	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// DefaultAccount is the service account of the agents in deploy/dra.
const DefaultAccount = "tandem-k8s-gpu"

// Account is a service account of agents.
type Account struct {
	Name      string
	Namespace string // "" = any
}

// policy is deploy/dra/admission.yaml.
//
//go:embed admission.yaml
var policy string

// Names of objects (apimachinery's validation of names).
var (
	accountForm   = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)
	namespaceForm = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`)
)

// AdmissionPolicy returns the admission policy that keeps the agents with an account to the slices of their nodes, as YAML documents. The
// objects have the name of the account.
func AdmissionPolicy(a Account) ([]byte, error) {
	switch {
	case len(a.Name) > 253 || !accountForm.MatchString(a.Name):
		return nil, &setting.Error{Key: "--service-account", Value: a.Name, Remedy: "want the name of the agents' service account"}
	case a.Namespace != "" && (len(a.Namespace) > 63 || !namespaceForm.MatchString(a.Namespace)):
		return nil, &setting.Error{Key: "--namespace", Value: a.Namespace, Remedy: "want the namespace of that account, or none for any"}
	}
	if a == (Account{Name: DefaultAccount}) {
		return []byte(policy), nil
	}
	namespace := "[^:]+"
	if a.Namespace != "" {
		namespace = a.Namespace
	}
	_, text, _ := strings.Cut(policy, "\napiVersion") // the comment at the beginning is about the default account
	return []byte(strings.NewReplacer(
		"\n  name: "+DefaultAccount+"\n", "\n  name: "+a.Name+"\n",
		"policyName: "+DefaultAccount+"\n", "policyName: "+a.Name+"\n",
		"'^system:serviceaccount:[^:]+:[^:]*"+DefaultAccount+"[^:]*$'", "'^system:serviceaccount:"+namespace+":"+strings.ReplaceAll(a.Name, ".", "[.]")+"$'",
	).Replace("apiVersion" + text)), nil
}
