package cli_test

import (
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/cli/commands"
)

// apiSchema is a part of docs/openapi.yaml.
type apiSchema struct {
	Ref        string                `yaml:"$ref"`
	Properties map[string]*apiSchema `yaml:"properties"`
}

// requestFields returns the fields of all requests of the API, which errors can name.
func requestFields(t *testing.T) []string {
	t.Helper()
	text, err := os.ReadFile("../../docs/openapi.yaml")
	if err != nil {
		t.Fatal(err)
	}
	type operation struct {
		Parameters []struct {
			Name, In string
		}
		RequestBody struct {
			Content map[string]struct{ Schema apiSchema }
		} `yaml:"requestBody"`
	}
	var doc struct {
		Components struct{ Schemas map[string]*apiSchema }
		Paths      map[string]map[string]operation
	}
	if err := yaml.Unmarshal(text, &doc); err != nil {
		t.Fatal(err)
	}
	fields := map[string]bool{}
	var add func(prefix string, s *apiSchema, depth int)
	add = func(prefix string, s *apiSchema, depth int) {
		if name, ok := strings.CutPrefix(s.Ref, "#/components/schemas/"); ok {
			s = doc.Components.Schemas[name]
		}
		for name, p := range s.Properties {
			if p.Ref == "" {
				fields[prefix+name] = true
			} else if depth < 3 {
				add(prefix+name+".", p, depth+1)
			}
		}
	}
	for _, methods := range doc.Paths {
		for _, op := range methods {
			for _, p := range op.Parameters {
				if p.In == "query" {
					fields[p.Name] = true
				}
			}
			for _, c := range op.RequestBody.Content {
				add("", &c.Schema, 0)
			}
		}
	}
	return slices.Sorted(maps.Keys(fields))
}

// ownFields are set by the CLI itself, so that no user can correct them, or by other
// clients only.
var ownFields = []string{
	"cols", "rows", "term", "cursor", "offset", "oldest", "parent", "destroyed", "enabled", "if_missing", "job.workspace_create.if_missing",
	"workspace_create.if_missing", "maintenance", "memory", "public_key", "reference", "seconds", "state", "version", "json", "sha256",
	"job.setup.default", "job.setup.sum", "setup.default", "setup.sum", "scope_type", "scope_id", "vmid", "quick", "by",
}

// Each field of a request is set by a flag or an argument of some command, which the
// error about it names.
func TestFieldsOfRequestsHaveFlags(t *testing.T) {
	var all []*cobra.Command
	var collect func(*cobra.Command)
	collect = func(cmd *cobra.Command) {
		all = append(all, cmd)
		for _, c := range cmd.Commands() {
			collect(c)
		}
	}
	collect((&cli.App{Commands: commands.All()}).Root())
	fields := requestFields(t)
	if len(fields) < 50 {
		t.Fatalf("only %d fields", len(fields))
	}
	for _, field := range fields {
		name, mapped := cli.ArgumentFlag(field)
		set := slices.ContainsFunc(all, func(cmd *cobra.Command) bool {
			return cli.IsArgument(cmd, field) || slices.ContainsFunc(cli.FlagNames(field), func(name string) bool { return cmd.Flags().Lookup(name) != nil })
		})
		if argument := mapped && name == ""; (set || argument) == slices.Contains(ownFields, field) {
			t.Errorf("%s: set by a flag or argument: %v; add it to argumentFlags or ownFields", field, set)
		}
	}
	for field, name := range cli.ArgumentFlags {
		if name != "" && !slices.ContainsFunc(all, func(cmd *cobra.Command) bool { return cmd.Flags().Lookup(name) != nil }) {
			t.Errorf("%s has the flag --%s, which no command has", field, name)
		}
	}
}

func TestErrorsNameFlags(t *testing.T) {
	for _, c := range []struct {
		args  string
		field string
		want  string // the beginning of the message; "" means that it is no usage error
	}{
		{"workspace create data --size 8", "size_gb", "--size"},
		{"workspace create data", "size_gb", ""},
		{"workspace create data", "name", "name"},
		{"sandbox new --workspace-size 8 --workspace new:x", "workspace.size_gb", "--workspace-size"},
		{"job run --task x --ttl 4h", "ttl", "--ttl"},
		{"job run --task x --ttl 4h", "ttl_minutes", "--ttl"},
		{"job run --task x --attempts 2 --attempt-agent claude", "attempts.agents", "--attempt-agent"},
		{"job run --task x", "profile", ""},
		{"events --after 7", "after", "--after"},
		{"msg post --job job-a hello", "text", "text"},
		{"sandbox new --cores 4", "resources.cores", "--cores"},
	} {
		root := (&cli.App{Commands: commands.All()}).Root()
		cmd, rest, err := root.Find(strings.Fields(c.args))
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.ParseFlags(rest); err != nil {
			t.Fatalf("%s: %v", c.args, err)
		}
		err = cli.ArgumentError(cmd, agentlab.Errorf(agentlab.CodeInvalid, "it is wrong").WithField(c.field))
		if want := c.want + ": it is wrong"; (cli.ExitCode(err) == cli.ExitUsage) != (c.want != "") || c.want != "" && err.Error() != want {
			t.Errorf("%s: %s: %q, exit code %d", c.args, c.field, err, cli.ExitCode(err))
		}
	}
}
