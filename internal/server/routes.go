package server

import (
	"context"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"strings"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// route is one row of the API. Every column is required.
type route struct {
	method  string
	path    string
	access  Access // minimum access of a caller
	verb    string // one of verbs, to which a token may be restricted
	target  target // which parameter names the sandbox or job of the call
	origin  origin // whether a token is accepted
	status  int    // of success
	id      string // operation ID in the OpenAPI document, and the name of the client's method
	summary string
	bind    binder
}

// binder registers a handler for an operation and documents its types.
type binder func(s *Server, op huma.Operation)

const (
	get  = http.MethodGet
	put  = http.MethodPut
	post = http.MethodPost
	del  = http.MethodDelete
)

// routes returns the routes of the API.
func (s *Server) routes() []route {
	const jobs, sandboxes, profiles = "/v1/jobs", "/v1/sandboxes", "/v1/profiles"
	const job, sandbox, profile = jobs + "/{job}", sandboxes + "/{sandbox}", profiles + "/{profile}"
	const vault, bundle = "/v1/secrets", "/v1/secrets/{bundle}"
	return append([]route{
		{get, "/v1/health", AccessRead, "daemon.read", noTarget, anyOrigin, 200, "health", "Check that the daemon is running", call(s.health)},
		{get, "/v1/status", AccessRead, "daemon.read", noTarget, anyOrigin, 200, "status", "Show the state of the daemon", call(s.status)},
		{get, "/v1/backends", AccessRead, "daemon.read", noTarget, anyOrigin, 200, "backends", "List the backends of the daemon, the default first", listing(s.backends)},
		{get, "/v1/backends/{backend}/checks", AccessRead, "host.read", noTarget, anyOrigin, 200, "check-backend", "Check a backend now", call(s.checkBackend)},
		{post, "/v1/backends/{backend}/drain", AccessAdmin, "host.drain", noTarget, anyOrigin, 200, "drain-backend", "Make no new sandboxes and workspaces on a backend", call(s.drainBackend)},
		{post, "/v1/backends/{backend}/undrain", AccessAdmin, "host.drain", noTarget, anyOrigin, 200, "undrain-backend", "Make sandboxes and workspaces on a backend again", call(s.undrainBackend)},
		{get, "/v1/metrics", AccessRead, "daemon.read", noTarget, anyOrigin, 200, "metrics", "Read the metrics of the daemon in the text format of Prometheus", raw("text/plain", s.metrics)},
		{post, "/v1/daemon/stop", AccessAdmin, "daemon.stop", noTarget, localOnly, 202, "stop-daemon", "Stop the daemon; VMs keep running", call(s.stopDaemon)},
		{post, "/v1/daemon/backup", AccessAdmin, "daemon.backup", noTarget, anyOrigin, 201, "backup-database", "Make a backup of the database", call(s.backupDatabase)},
		{post, "/v1/daemon/clock/confirm", AccessAdmin, "daemon.clock", noTarget, anyOrigin, 200, "confirm-clock", "Confirm that the clock of the host is right, so that retention continues", call(s.confirmClock)},
		{get, "/v1/events", AccessRead, "event.read", byQuery, anyOrigin, 200, "events", "List or follow events", sseOr(s.events, api.List[api.Event]{}, sseType{"ready", struct{}{}}, sseType{"event", api.Event{}}, sseType{"error", api.Error{}})},
		{get, "/v1/egress", AccessRead, "egress.read", byQuery, anyOrigin, 200, "egress", "List or follow egress decisions", sseOr(s.egress, api.List[api.EgressRecord]{}, sseType{"ready", struct{}{}}, sseType{"record", api.EgressRecord{}}, sseType{"error", api.Error{}})},

		{post, jobs, AccessWrite, verbRunJobs, noTarget, anyOrigin, 201, "create-job", "Create a job", call(s.createJob)},
		{post, jobs + "/validate", AccessWrite, verbRunJobs, noTarget, anyOrigin, 204, "validate-job", "Validate a job without creating it", call(s.validateJob)},
		{get, jobs, AccessRead, "job.read", noTarget, anyOrigin, 200, "jobs", "List jobs, newest first", call(s.listJobs)},
		{get, job, AccessRead, "job.read", onJob, anyOrigin, 200, "job", "Show a job, its last events and its artifacts", call(s.getJob)},
		{post, job + "/cancel", AccessWrite, "job.cancel", onJob, anyOrigin, 202, "cancel-job", "Cancel a job", call(s.cancelJob)},
		{post, job + "/salvage", AccessWrite, verbRunJobs, onJob, anyOrigin, 201, "salvage-job", "Extract the work of an ended job from the kept disk of its sandbox, in a job of its own", call(s.salvageJob)},
		{get, job + "/log", AccessRead, "job.read", onJob, anyOrigin, 200, "job-log", "Read the agent's log", raw("text/plain", s.jobLog)},
		{get, job + "/artifacts", AccessRead, "job.read", onJob, anyOrigin, 200, "artifacts", "List the artifacts of a job", paged("artifacts", s.listArtifacts, func(a api.Artifact) []string { return []string{a.Path} })},
		{get, job + "/artifacts/{path...}", AccessRead, "job.read", onJob, anyOrigin, 200, "artifact", "Download an artifact of a job", raw("application/octet-stream", s.getArtifact)},
		{get, job + "/bundle", AccessRead, "job.read", onJob, anyOrigin, 200, "job-bundle", "Download all artifacts of a job as tar.gz", raw("application/gzip", s.jobBundle)},
		{post, "/v1/bundles", AccessWrite, verbRunJobs, noTarget, anyOrigin, 201, "upload-bundle", "Upload a git bundle for a job", upload("application/octet-stream", s.uploadBundle)},
		{del, "/v1/bundles/{bundle}", AccessWrite, verbRunJobs, noTarget, anyOrigin, 204, "delete-bundle", "Delete an uploaded git bundle that no job uses", call(s.deleteBundle)},

		{post, sandboxes, AccessWrite, "sandbox.create", noTarget, anyOrigin, 201, "create-sandbox", "Create a sandbox", call(s.createSandbox)},
		{get, sandboxes, AccessRead, "sandbox.read", noTarget, anyOrigin, 200, "sandboxes", "List sandboxes by VMID", call(s.listSandboxes)},
		{get, sandbox, AccessRead, "sandbox.read", onSandbox, anyOrigin, 200, "sandbox", "Show a sandbox", call(s.getSandbox)},
		{post, sandbox + "/start", AccessWrite, "sandbox.power", onSandbox, anyOrigin, 202, "start-sandbox", "Start a stopped sandbox", call(s.startSandbox)},
		{post, sandbox + "/stop", AccessWrite, "sandbox.power", onSandbox, anyOrigin, 202, "stop-sandbox", "Power off a sandbox and keep its disk", call(s.stopSandbox)},
		{post, sandbox + "/suspend", AccessWrite, "sandbox.power", onSandbox, anyOrigin, 202, "suspend-sandbox", "Suspend a READY sandbox, in memory or to disk", call(s.suspendSandbox)},
		{post, sandbox + "/resume", AccessWrite, "sandbox.power", onSandbox, anyOrigin, 202, "resume-sandbox", "Resume a suspended sandbox", call(s.resumeSandbox)},
		{post, sandbox + "/destroy", AccessWrite, "sandbox.destroy", onSandbox, anyOrigin, 202, "destroy-sandbox", "Destroy a sandbox", call(s.destroySandbox)},
		{post, sandbox + "/lease/renew", AccessWrite, "sandbox.power", onSandbox, anyOrigin, 200, "renew-lease", "Set the end of the lease", call(s.renewLease)},
		{get, sandbox + "/console", AccessRead, "sandbox.read", onSandbox, anyOrigin, 200, "console", "Read the console of the VM", raw("text/plain", s.console)},
		{post, sandbox + "/exec", AccessWrite, "sandbox.exec", onSandbox, anyOrigin, 101, "exec", "Run a command in a sandbox", upgrades(guestapi.StreamProtocol, s.exec)},
		{post, sandbox + "/attach", AccessWrite, "sandbox.exec", onSandbox, anyOrigin, 101, "attach", "Attach to a terminal of a sandbox", upgrades(guestapi.StreamProtocol, s.attach)},
		{post, sandbox + "/dial", AccessWrite, "sandbox.exec", onSandbox, anyOrigin, 101, "dial", "Open a TCP connection to a port in a sandbox", upgrades(api.TCPProtocol, s.dial)},
		{post, sandbox + "/verify", AccessWrite, "sandbox.exec", onSandbox, anyOrigin, 200, "verify-sandbox", "Check the network of a sandbox from inside", call(s.verify)},
		{post, sandbox + "/ssh-key", AccessWrite, "sandbox.exec", onSandbox, anyOrigin, 200, "ssh-key", "Authorize an ephemeral SSH key in a sandbox", call(s.sshKey)},

		{get, profiles, AccessRead, "profile.read", noTarget, anyOrigin, 200, "profiles", "List profiles", listing(s.listProfiles)},
		{post, profiles + "/validate", AccessRead, "profile.read", noTarget, anyOrigin, 200, "validate-profile", "Validate a profile without storing it", upload("application/yaml", s.validateProfile)},
		{get, profile, AccessRead, "profile.read", noTarget, anyOrigin, 200, "profile", "Show a profile with its YAML", call(s.getProfile)},
		{put, profile, AccessAdmin, "profile.write", noTarget, anyOrigin, 200, "put-profile", "Create or replace a profile", upload("application/yaml", s.putProfile)},
		{del, profile, AccessAdmin, "profile.write", noTarget, anyOrigin, 204, "remove-profile", "Remove the user's profile with this text", call(s.removeProfile)},

		{get, vault, AccessRead, "secret.read", noTarget, anyOrigin, 200, "secrets", "List secrets bundles and their keys, without values", listing(s.listBundles)},
		{post, vault, AccessAdmin, "secret.write", noTarget, localOnly, 204, "create-secrets", "Create an empty secrets bundle", call(s.createBundle)},
		{post, vault + "/init", AccessAdmin, "secret.write", noTarget, localOnly, 200, "init-secrets", "Create the encryption key of secrets bundles, if it is missing", call(s.initSecrets)},
		{post, vault + "/rotate", AccessAdmin, "secret.write", noTarget, localOnly, 200, "rotate-secrets", "Create a new key and re-encrypt every secrets bundle", call(s.rotateSecrets)},
		{post, vault + "/validate", AccessAdmin, "secret.write", noTarget, localOnly, 200, "validate-secrets", "Check secrets bundles, and with resolve their references", call(s.validateSecrets)},
		{get, bundle, AccessRead, "secret.read", noTarget, anyOrigin, 200, "secret-keys", "List the keys of a secrets bundle, without values", listing(s.listSecrets)},
		{put, bundle, AccessAdmin, "secret.write", noTarget, localOnly, 204, "replace-secrets", "Replace the text of a secrets bundle", upload("application/yaml", s.replaceSecrets)},
		{post, bundle + "/show", AccessAdmin, "secret.write", noTarget, localOnly, 200, "show-secrets", "Show the keys and references of a secrets bundle, and with reveal the values", listing(s.showSecrets)},
		{post, bundle + "/text", AccessAdmin, "secret.write", noTarget, localOnly, 200, "secrets-text", "Read the decrypted text of a secrets bundle", call(s.secretsText)},
		{put, bundle + "/{key}", AccessAdmin, "secret.write", noTarget, localOnly, 204, "set-secret", "Set one value of a secrets bundle", upload("application/octet-stream", s.setSecret)},
		{del, bundle + "/{key}", AccessAdmin, "secret.write", noTarget, localOnly, 204, "unset-secret", "Remove one value of a secrets bundle", call(s.unsetSecret)},
	}, slices.Concat(s.hostRoutes(), s.orphanRoutes(), s.policyRoutes(), s.snapshotRoutes(), s.setupRoutes(), s.messageRoutes(), s.workspaceRoutes(), s.sessionRoutes(), s.portRoutes(), s.doctorRoutes(), s.cacheRoutes())...)
}

// hostRoutes returns the routes for tokens, the host and its images.
func (s *Server) hostRoutes() []route {
	const images, image, templates = "/v1/images", "/v1/images/{image}", "/v1/templates"
	return []route{
		{post, "/v1/tokens", AccessAdmin, "token.manage", noTarget, localOnly, 201, "create-token", "Create a token; only this response contains its secret", call(s.createToken)},
		{get, "/v1/tokens", AccessAdmin, "token.manage", noTarget, localOnly, 200, "tokens", "List tokens, without their secrets", paged("tokens", s.listTokens, func(t api.Token) []string { return []string{t.Name} })},
		{del, "/v1/tokens/{token}", AccessAdmin, "token.manage", noTarget, localOnly, 200, "revoke-token", "Revoke a token and end the calls that use it", call(s.revokeToken)},

		{get, "/v1/host/checks", AccessRead, "host.read", noTarget, anyOrigin, 200, "host-checks", "Check the host now and return all results", call(s.hostChecks)},
		{get, "/v1/host/network", AccessRead, "host.read", noTarget, anyOrigin, 200, "host-network", "Show the state of the firewall of the bridge for sandboxes", call(s.hostNetwork)},
		{get, "/v1/host/network/rules", AccessRead, "host.read", noTarget, anyOrigin, 200, "host-network-rules", "Print the rules of the firewall", raw("text/plain", s.hostNetworkRules)},
		{post, "/v1/host/network", AccessAdmin, "host.network", noTarget, localOnly, 200, "apply-host-network", "Apply the rules of the firewall", call(s.applyHostNetwork)},
		{del, "/v1/host/network", AccessAdmin, "host.network", noTarget, localOnly, 200, "remove-host-network", "Remove the rules of the firewall", call(s.removeHostNetwork)},

		{get, images, AccessRead, "image.read", noTarget, anyOrigin, 200, "images", "List images", listing(s.listImages)},
		{get, image, AccessRead, "image.read", noTarget, anyOrigin, 200, "image", "Show an image", call(s.getImage)},
		{post, images, AccessAdmin, "image.write", noTarget, anyOrigin, 200, "build-image", "Build an image", sseOr(s.buildImage, nil, sseType{"progress", api.ImageProgress{}}, sseType{"done", api.Image{}}, sseType{"error", api.Error{}})},
		{del, image, AccessAdmin, "image.write", noTarget, anyOrigin, 204, "remove-image", "Remove an image", call(s.removeImage)},
		{post, image + "/warm", AccessWrite, "sandbox.create", noTarget, anyOrigin, 200, "warm-image", "Make the template from which sandboxes with an image start", sseOr(s.warmImage, nil, sseType{"progress", api.ImageProgress{}}, sseType{"done", api.Template{}}, sseType{"error", api.Error{}})},
		{get, "/v1/layers", AccessRead, "image.read", noTarget, anyOrigin, 200, "image-layers", "List the results of build steps that later builds use again", listing(s.listLayers)},
		{del, "/v1/layers", AccessAdmin, "image.write", noTarget, anyOrigin, 200, "remove-image-layers", "Remove the results of build steps that later builds use again", listing(s.removeLayers)},
		{get, templates, AccessRead, "image.read", noTarget, anyOrigin, 200, "templates", "List templates: booted guests of which sandboxes start as copies", call(s.listTemplates)},
		{del, templates, AccessAdmin, "image.write", noTarget, anyOrigin, 200, "remove-templates", "Remove all templates", listing(s.removeTemplates)},
		{del, templates + "/{template}", AccessAdmin, "image.write", noTarget, anyOrigin, 200, "remove-template", "Remove a template", listing(s.removeTemplate)},
	}
}

// orphanRoutes returns the routes for VMs that belong to no sandbox.
func (s *Server) orphanRoutes() []route {
	return []route{
		{get, "/v1/orphans", AccessRead, "sandbox.read", noTarget, anyOrigin, 200, "orphans", "List orphans: virtual machines with AgentLab's mark that belong to no sandbox", call(s.listOrphans)},
		{post, "/v1/orphans/{orphan}/destroy", AccessAdmin, "sandbox.destroy", noTarget, anyOrigin, 200, "destroy-orphan", "Destroy an orphan", call(s.destroyOrphan)},
	}
}

// policyRoutes returns the routes for network policies.
func (s *Server) policyRoutes() []route {
	const sandbox, profile = "/v1/sandboxes/{sandbox}", "/v1/profiles/{profile}"
	return []route{
		{get, sandbox + "/policy", AccessRead, "sandbox.read", onSandbox, anyOrigin, 200, "sandbox-policy", "Show the network policy of a sandbox", call(s.sandboxPolicy)},
		{get, sandbox + "/policy/check", AccessRead, "sandbox.read", onSandbox, anyOrigin, 200, "check-sandbox-policy", "Check a target against the policy of a sandbox", call(s.checkSandboxPolicy)},
		{post, sandbox + "/policy/reload", AccessWrite, "policy.reload", onSandbox, anyOrigin, 200, "reload-sandbox-policy", "Apply the current policy of its profile to a sandbox", call(s.reloadSandboxPolicy)},
		{get, profile + "/policy", AccessRead, "profile.read", noTarget, anyOrigin, 200, "profile-policy", "Show the network policy of a profile", call(s.profilePolicy)},
		{get, profile + "/policy/check", AccessRead, "profile.read", noTarget, anyOrigin, 200, "check-profile-policy", "Check a target against the policy of a profile", call(s.checkProfilePolicy)},
		{get, "/v1/policy/presets", AccessRead, "profile.read", noTarget, anyOrigin, 200, "policy-presets", "List the rule lists for preset:NAME in profiles", listing(s.policyPresets)},
		{post, "/v1/policy/reload", AccessWrite, "policy.reload", noTarget, anyOrigin, 200, "reload-policies", "Apply the current policies of profiles to all sandboxes", listing(s.reloadPolicies)},
	}
}

// register adds one row to the mux and the OpenAPI document.
func (s *Server) register(r route) error {
	if err := r.check(); err != nil {
		return err
	}
	r.bind(s, huma.Operation{
		OperationID:     r.id,
		Method:          r.method,
		Path:            r.path,
		Summary:         r.summary,
		Tags:            []string{strings.Split(r.path, "/")[2]},
		DefaultStatus:   r.status,
		MaxBodyBytes:    maxJSONBytes,
		BodyReadTimeout: -1, // the type body limits it
		Extensions:      map[string]any{"x-access": r.access.String(), "x-verb": r.verb, "x-target": r.target.String(), "x-reach": r.origin.String()},
		Middlewares: huma.Middlewares{func(hc huma.Context, next func(huma.Context)) {
			err := s.authorize(hc, r)
			if err == nil {
				err = s.expandJobID(hc, r)
			}
			if err != nil {
				req, w := humago.Unwrap(hc)
				s.logRejection(req, err)
				writeProblem(w, err)
				return
			}
			next(hc)
		}},
	})
	return nil
}

// check rejects a row with an empty column or with columns that contradict
// each other.
func (r route) check() error {
	switch {
	case r.access < AccessRead || r.access > AccessAdmin || r.method == "" || r.path == "" || r.status == 0 || r.id == "" || r.summary == "" || r.bind == nil:
		return fmt.Errorf("server: route %s %s lacks a column (access %s)", r.method, r.path, r.access)
	case !knownVerb(r.verb):
		return fmt.Errorf("server: route %s %s: verb %q is not in verbs", r.method, r.path, r.verb)
	case r.target < noTarget || r.target > byScope || r.origin < anyOrigin || r.origin > localOnly:
		return fmt.Errorf("server: route %s %s lacks a column (target or origin)", r.method, r.path)
	case strings.Contains(r.path, "{sandbox}") != (r.target == onSandbox) || strings.Contains(r.path, "{job}") != (r.target == onJob):
		return fmt.Errorf("server: route %s %s: the target does not match its path", r.method, r.path)
	}
	return nil
}

// answer is a JSON body.
type answer[O any] struct{ Body O }

// none is the output of a call whose answer has no body.
type none struct{}

// call binds a handler that decodes JSON and answers with JSON.
func call[I, O any](h func(context.Context, *I) (O, error)) binder {
	return func(s *Server, op huma.Operation) {
		if reflect.TypeFor[O]() == reflect.TypeFor[none]() {
			huma.Register(s.api, op, func(ctx context.Context, in *I) (*struct{}, error) {
				_, err := h(ctx, in)
				return nil, s.toHumaError(op, err)
			})
			return
		}
		huma.Register(s.api, op, func(ctx context.Context, in *I) (*answer[O], error) {
			out, err := h(ctx, in)
			if err != nil {
				return nil, s.toHumaError(op, err)
			}
			return &answer[O]{out}, nil
		})
	}
}

// listing binds a handler that answers with a list of one page.
func listing[I, T any](h func(context.Context, *I) ([]T, error)) binder {
	return call(func(ctx context.Context, in *I) (api.List[T], error) {
		items, err := h(ctx, in)
		return api.List[T]{Items: nonNil(items)}, err
	})
}

// upload binds a handler that reads the raw body (type payload) and answers
// with JSON.
func upload[I, O any](contentType string, h func(context.Context, *I) (O, error)) binder {
	return func(s *Server, op huma.Operation) {
		op.RequestBody = &huma.RequestBody{Required: true, Content: map[string]*huma.MediaType{
			contentType: {Schema: &huma.Schema{Type: huma.TypeString, Format: "binary"}},
		}}
		op.SkipValidateBody = true
		call(h)(s, op)
	}
}

// raw binds a handler that answers with a stream of bytes.
func raw[I any](contentType string, h func(context.Context, *I) (*huma.StreamResponse, error)) binder {
	return func(s *Server, op huma.Operation) {
		op.Responses = map[string]*huma.Response{"200": {
			Description: "Raw bytes",
			Content:     map[string]*huma.MediaType{contentType: {Schema: &huma.Schema{Type: huma.TypeString, Format: "binary"}}},
		}}
		streaming(h)(s, op)
	}
}

// upgrades binds a handler that upgrades the connection to a stream of the
// protocol.
func upgrades[I any](protocol string, h func(context.Context, *I) (*huma.StreamResponse, error)) binder {
	return func(s *Server, op huma.Operation) {
		op.Responses = map[string]*huma.Response{"101": {
			Description: "The connection switches to " + protocol,
			Headers:     map[string]*huma.Param{"Upgrade": {Schema: &huma.Schema{Type: huma.TypeString, Enum: []any{protocol}}}},
		}}
		streaming(h)(s, op)
	}
}

// sseType is one kind of message of an event stream.
type sseType struct {
	event string
	data  any
}

// sseOr binds a handler that answers with an event stream of the given
// messages or, if orJSON is not nil, with JSON of its type.
func sseOr[I any](h func(context.Context, *I) (*huma.StreamResponse, error), orJSON any, messages ...sseType) binder {
	return func(s *Server, op huma.Operation) {
		schemas := s.api.OpenAPI().Components.Schemas
		var kinds []*huma.Schema
		for _, m := range messages {
			t := reflect.TypeOf(m.data)
			if t == reflect.TypeFor[api.Error]() {
				t = reflect.TypeFor[problem]()
			}
			data := &huma.Schema{Type: huma.TypeObject}
			if t.NumField() > 0 {
				data = schemas.Schema(t, true, "")
			}
			kinds = append(kinds, &huma.Schema{
				Type: huma.TypeObject,
				Properties: map[string]*huma.Schema{
					"event": {Type: huma.TypeString, Enum: []any{m.event}},
					"id":    {Type: huma.TypeString},
					"data":  data,
				},
				Required: []string{"event", "data"},
			})
		}
		content := map[string]*huma.MediaType{"text/event-stream": {Schema: &huma.Schema{
			Description: "Server-sent events; each message is one of these",
			Type:        huma.TypeArray,
			Items:       &huma.Schema{OneOf: kinds},
		}}}
		if orJSON != nil {
			content["application/json"] = &huma.MediaType{Schema: schemas.Schema(reflect.TypeOf(orJSON), true, "")}
		}
		op.Responses = map[string]*huma.Response{"200": {Description: http.StatusText(http.StatusOK), Content: content}}
		streaming(h)(s, op)
	}
}

func streaming[I any](h func(context.Context, *I) (*huma.StreamResponse, error)) binder {
	return func(s *Server, op huma.Operation) {
		huma.Register(s.api, op, func(ctx context.Context, in *I) (*huma.StreamResponse, error) {
			out, err := h(ctx, in)
			if err != nil {
				return nil, s.toHumaError(op, err)
			}
			return out, nil
		})
	}
}

// toHumaError converts a service's error to the answer and logs what the answer
// does not contain. It returns nil for nil.
func (s *Server) toHumaError(op huma.Operation, err error) error {
	if err == nil {
		return nil
	}
	switch agentlab.CodeOf(err) {
	case agentlab.CodeInternal, agentlab.CodeSchema, agentlab.CodeUnknownOutcome:
		s.log.Error("call failed", "call", op.OperationID, "err", err)
	default:
		s.log.Debug("call refused", "call", op.OperationID, "err", err)
	}
	return problemOf(err)
}

// apiConfig returns huma's configuration, with JSON only and without the
// routes and links that huma would add.
func apiConfig(version string) huma.Config {
	c := huma.DefaultConfig("AgentLab control API", version)
	c.OpenAPIPath, c.DocsPath, c.SchemasPath = "", "", ""
	c.CreateHooks = nil
	c.Formats = map[string]huma.Format{"application/json": huma.DefaultJSONFormat, "json": huma.DefaultJSONFormat} // "json" for problem+json
	c.RejectUnknownQueryParameters = true
	c.Info.Description = "Served on a unix socket. Callers are identified by their user ID; x-access is the required access: " +
		"read and write are open to root, the daemon's own user and (in system mode) members of group agentlab, admin to the first two. " +
		"The response to a failed call is a Problem."
	return c
}
